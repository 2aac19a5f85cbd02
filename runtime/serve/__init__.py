"""An engine directory as a service: OpenAI's API over a session. Needs the extra ``serve``."""
