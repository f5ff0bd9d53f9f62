"""What a forward and backward pass of the learner holds at once, where it holds most.

One rule: as for `memory`, each term names tensors. There are three moments: the backward pass of the head, when all
that the forward pass kept is there; that of a layer, whose activations may have to be made again first; and the end,
when the gradients of what lies outside the layers are summed over the ranks. What is given up between them is not
added up.
"""

from __future__ import annotations

from collections.abc import Iterator

from gspo_core.plan.setting import FLOAT, HALF, KEYS_PER_TOKEN, Setting, all_shapes, layer_size, root_size, size


def highest_moment(setting: Setting) -> dict[str, int]:
    """Bytes by kind, beside weights, moments, and the gradients that earlier micro-batches have left."""
    found = (_at_the_head(setting), _at_a_layer(setting), _at_the_end(setting))
    held = {"half-precision copies": _copies(setting)} if _copies(setting) else {}
    return max(found, key=lambda one: sum(one.values())) | held


def _at_the_head(setting: Setting) -> dict[str, int]:
    model, tokens = setting.shape, setting.own_tokens
    found = {
        "activations": kept_bytes(setting) + setting.width * model.hidden * tokens,  # and the gradient of the last
        "logits chunk": logit_bytes(setting),
        **_gathered_keys(setting),
    }
    if setting.num_ranks > 1:  # the last layer's buffer stays until the next one is gathered
        found["gathered weights"] = setting.width * (root_size(model) + layer_size(model))
    return found


def _at_a_layer(setting: Setting) -> dict[str, int]:
    """Backward through the last layer but one, while the last one's gradients are still being summed."""
    model, tokens = setting.shape, setting.own_tokens
    layer = layer_size(model)
    kept = _between(setting) + (max(_layers(setting)) if setting.is_checkpointed else 0)
    found = {"activations": kept + gradient_bytes(setting) * tokens, **_gathered_keys(setting)}
    if setting.num_ranks > 1:  # a layer, and the next one on its way
        found["gathered weights"] = setting.width * (root_size(model) + 2 * layer)
    if setting.lora_rank is None:
        found["gradients before they are summed"] = _head_gradient(setting) + _of_a_layer(setting, layer)
    return found


def _at_the_end(setting: Setting) -> dict[str, int]:
    root = root_size(setting.shape)
    found = {"gathered weights": setting.width * root} if setting.num_ranks > 1 else {}
    if setting.lora_rank is None:
        own = _head_gradient(setting) if setting.num_ranks == 1 else 0
        found["gradients before they are summed"] = own + _being_summed(setting, root)
    return found


def _of_a_layer(setting: Setting, numbers: int) -> int:
    """Its gradients as they are computed, and in float32 those of the layer before it, whose sum went to the ranks."""
    return (setting.width + FLOAT) * numbers if setting.num_ranks > 1 else 0


def _being_summed(setting: Setting, numbers: int) -> int:
    """Gradients as they are computed; several ranks copy them to float32, and each gets its part of the sum."""
    if setting.num_ranks == 1:
        own = FLOAT + (HALF if setting.is_half else 0)  # the embedding's: as computed, and as summed
        return own * setting.shape.vocabulary * setting.shape.hidden
    return (setting.width + FLOAT) * numbers + FLOAT * -(-numbers // setting.num_parts)


def _head_gradient(setting: Setting) -> int:
    """It waits for the end on several ranks, and for that of the embedding where both are one matrix."""
    is_kept = setting.num_ranks > 1 or setting.shape.is_tied
    width = setting.width if setting.num_ranks > 1 else FLOAT
    return width * setting.shape.vocabulary * setting.shape.hidden if is_kept else 0


def _copies(setting: Setting) -> int:
    """A single rank casts the weights of a module when that computes; those of a layer are kept for its backward pass,
    or made again with it. Frozen weights that are kept in half precision need none."""
    if setting.num_ranks > 1 or not setting.is_half or setting.base_width == HALF:
        return 0
    model = setting.shape
    return HALF * (layer_size(model) if setting.is_checkpointed else size(all_shapes(model)) - root_size(model))


def _gathered_keys(setting: Setting) -> dict[str, int]:
    """What gathered keys and values may take beyond the tokens that they are counted for: nothing, where several heads
    share them. At worst a micro-batch is full of them."""
    if not setting.shares_beginnings:
        return {}
    model = setting.shape
    gathered = KEYS_PER_TOKEN * 2 * model.keys * setting.key_copies * setting.width
    numbers = range(model.num_layers)
    if setting.is_checkpointed:  # those of a layer at a time, beside the inputs of all
        beyond = max(0, gathered * setting.own_tokens - max(_layers(setting)) - _between(setting))
    else:
        beyond = sum(max(0, gathered - layer_bytes(setting, number)) for number in numbers) * setting.own_tokens
    return {"gathered keys": beyond} if beyond else {}


def _layers(setting: Setting) -> Iterator[int]:
    return (layer_bytes(setting, number) * setting.own_tokens for number in range(setting.shape.num_layers))


def _between(setting: Setting) -> int:
    """What all layers keep for their backward passes; if they are recomputed, only their inputs, and the result of
    attention if that is kept."""
    if not setting.is_checkpointed:
        return sum(_layers(setting))
    model = setting.shape
    attention = setting.width * model.queries + FLOAT * model.num_heads if setting.keeps_attention else 0
    return model.num_layers * (setting.width * model.hidden + attention) * setting.own_tokens


def kept_bytes(setting: Setting) -> int:
    """What the forward pass keeps for the backward pass: of the layers, of the last norm, and the rows to score."""
    after = FLOAT + 2 * setting.width
    return _between(setting) + after * setting.shape.hidden * setting.own_tokens


def gradient_bytes(setting: Setting) -> int:
    """Gradients of one token on their way through a layer, where it is widest: its output's, and two within the
    perceptron."""
    model = setting.shape
    inner = max(model.intermediate, 0 if not model.num_experts else model.experts_per_token * model.hidden)
    return setting.width * (model.hidden + 2 * inner)


def layer_bytes(setting: Setting, number: int) -> int:
    """Bytes that one layer keeps of one token for its backward pass."""
    model, width = setting.shape, setting.width
    h, q, k = model.hidden, model.queries, model.keys
    norms = _norm_bytes(setting)
    if model.has_query_norms:
        norms += (FLOAT + width) * (q + k) + FLOAT * (model.num_heads + model.num_key_heads)
    # queries, keys, values, result, and its copy; ranks that share a micro-batch have all tokens of some heads instead
    attention = width * (2 * q + 2 * k * setting.key_copies + q) + FLOAT * model.num_heads
    if number not in model.sparse_layers:
        return norms + attention + 4 * width * model.intermediate
    chosen, inner = model.experts_per_token, model.expert_intermediate
    routing = FLOAT * model.num_experts + 8 * 4 * chosen + width * chosen
    return norms + attention + routing + width * chosen * (2 * h + 4 * inner)


def _norm_bytes(setting: Setting) -> int:
    """Two norms: the input and the normed input of each, and what enters the matrices behind it."""
    h = setting.shape.hidden
    if not setting.is_half:
        return 6 * FLOAT * h + 2 * FLOAT
    return 2 * (FLOAT + 2 * HALF) * h + 2 * FLOAT


def logit_bytes(setting: Setting) -> int:
    """The head's output for some rows, and the gradient of the head, where they take most."""
    model = setting.shape
    head, chunk = model.vocabulary * model.hidden, setting.logit_rows * model.vocabulary
    copy = HALF * head if setting.is_half and setting.num_ranks == 1 else 0
    if not setting.is_half:
        backward = FLOAT * chunk
    else:
        widened = FLOAT * head if setting.device == "cpu" else 0  # a GPU multiplies halves into float32
        product = 0 if setting.lora_rank is not None else HALF * head
        backward = max(FLOAT * chunk + widened, (FLOAT + HALF) * chunk, HALF * chunk + product)
    gradient = 0 if setting.lora_rank is not None else FLOAT * head
    return copy + max(2 * FLOAT * chunk, gradient + backward)
