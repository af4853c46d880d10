"""Many virtual engines behind one router."""
