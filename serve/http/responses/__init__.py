"""OpenAI's Responses API: its requests, answers, events, and the responses that are kept."""
