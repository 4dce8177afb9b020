"""Models by name: finding them in the Hugging Face cache, and fetching them from the hub.

`huggingface_hub` is imported when a model is fetched, not before: it gives the session and the
token. The transfers are this package's own, because that library starts an interrupted file again
and takes any amount of data from a server.
"""
