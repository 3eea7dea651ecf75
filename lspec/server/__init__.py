"""An OpenAI-compatible server for one engine; it comes with `lspec[server]`."""
