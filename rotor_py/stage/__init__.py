"""Run one stage in the forward, recompute it in the backward, and store what autograd saves for it."""
