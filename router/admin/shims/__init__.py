"""Routes as other gateways have them, for the tools that call those: the same objects, no store of their own."""
