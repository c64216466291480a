"""Many processes: the machine's limits, the plan, starting and stopping Ray and the actors."""
