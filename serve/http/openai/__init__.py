"""The shapes of OpenAI's API and vLLM's additions: completions, chat, embeddings, models, tokenize.

Each *_endpoint.py owns the routes of one endpoint; requests.py parses its body and the
*_writer modules write its answer. It does not know Anthropic's API or how
requests are scheduled. Begin with chat_endpoint.py.
"""
