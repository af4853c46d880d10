"""The live view of a router or of one engine: snapshots, a timeline, and the page that shows them."""
