"""An HTTP server with OpenAI's API for an engine directory. Needs the extra ``serve``."""
