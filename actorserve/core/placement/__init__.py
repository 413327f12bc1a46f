"""Which instance a request goes to: Llumnix's virtual usage, freeness and dispatch."""
