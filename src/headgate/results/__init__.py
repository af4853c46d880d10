"""What happened: tables, metrics, comparisons."""
