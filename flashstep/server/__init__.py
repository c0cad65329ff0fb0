"""The OpenAI interface over HTTP: parse, refuse clearly, stream. Imports no tensor library.

``protocol`` says what a body may hold and ``errors`` how a refusal looks; ``completions`` and ``chat`` turn a body into
engine requests and deltas into answers; ``generation`` runs those for one client; ``app`` has the routes; ``serve``
owns the process. A request passes through them in this order.
"""
