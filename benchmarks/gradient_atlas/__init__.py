"""The gradient atlas: how far is what an estimator makes of old data from the true gradient at the same weights?

Read ``world`` (a policy small enough to know everything about it), ``estimators`` (what is compared), ``measure``
(gradients and their statistics), then ``report``. ``docs/staleness.md`` says what came out.
"""
