"""Megatron's sharded state dicts and optimizers, as shards and values of the state; told by attributes, with nothing imported."""
