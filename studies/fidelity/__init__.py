"""The same requests through a real engine and through the simulator; how far apart they are."""
