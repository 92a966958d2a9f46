"""How token dims pass through ops: the rules that rows of the op table refer to."""
