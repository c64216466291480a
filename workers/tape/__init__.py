"""The trunk tape: the matrices that every token needs, packed in execution order, and the ring that streams them."""
