"""Memory that the state of one rank takes, computed from the settings; activations come on top (docs/trainer.md)."""

from training.config import TrainConfig

# fp32 shard of the parameter (the master), of its gradient, and AdamW's two moments.
_STATE_BYTES = 4 + 4 + 8


def rank_memory_bytes(config: TrainConfig, world_size: int) -> float:
    """Sharded state, and the parameters that FSDP holds whole at a time: the root's and those of two blocks.

        16 P / dp_shard  +  bytes(param_dtype) x (P_root + 2 P_block)

    P_root is embedding, last norm and head, whole from forward to backward; two blocks are the one that computes and
    the one that is gathered meanwhile.
    """
    model = config.model
    shards = world_size // config.parallelism.dp_replicate
    root = model.num_parameters - model.num_hidden_layers * model.num_block_parameters
    whole = root + min(2, model.num_hidden_layers) * model.num_block_parameters
    width = 4 if config.parallelism.param_dtype == "float32" else 2
    return _STATE_BYTES * model.num_parameters / shards + width * whole
