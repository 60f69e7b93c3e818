"""HTTP/1.1 for the relay: callbacks on uvloop and httptools, no task and no future for a request."""
