"""`Session`: the training loop of a member, its steps, votes and recoveries."""
