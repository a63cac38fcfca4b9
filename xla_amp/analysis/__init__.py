"""What follows from values of a program, on any front: graphs of values, products and their costs, loops, biases."""
