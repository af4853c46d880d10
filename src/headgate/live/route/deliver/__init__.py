"""One request brought to an engine and its answer to the client: connections, retries, relay, hand-over."""
