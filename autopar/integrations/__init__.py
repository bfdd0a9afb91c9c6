"""What other libraries need to take a parallel module for a model of theirs."""
