"""The edge of the HTTP server: everything that is checked before the meaning of a body matters.

It owns connections, framing, TLS, API keys, quotas, size limits, deadlines and error bodies. It
does not know any API's fields, and it does not know the engine. Begin with connection.py and
body.py; limits.py has the numbers.
"""
