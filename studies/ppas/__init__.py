"""P-PAS's published results on derived cards."""
