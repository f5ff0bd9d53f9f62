"""How agents speak to the gateway: one module a dialect, all with the interface of ``dialect``, which names errors too.

``turns`` is a request and its answer in no dialect.
``fields`` is the one table of what each dialect may send and what becomes of it; ``sent`` reads values by it, ``asks``
makes the ask, ``tool_forms`` reads tools that are no functions. To add a dialect, write its module and its fields, and
give it a path in ``services.gateway.http.app``.
"""
