"""Plans of saves, loads and exchanges: the parts that each rank writes, reads, sends or would hold on another topology."""
