"""Which experts stay in memory: the policies, the recorded trace of requests and its replay. No I/O but the trace's."""
