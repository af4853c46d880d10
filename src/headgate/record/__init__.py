"""What happened in a run: tables, recorders, traces."""
