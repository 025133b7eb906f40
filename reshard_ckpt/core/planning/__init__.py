"""Plans: the parts of tensors that each rank writes, reads, sends to others, or would hold in another topology."""
