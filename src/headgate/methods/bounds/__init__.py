"""The rate no policy can exceed."""
