"""What is known of operators, of the tensors' memory that they touch, and of modules by their names."""
