"""The reconstruction rules, by kind of op: how an operand follows from the result."""
