"""What torch programs consist of, on any device: paths of modules, places, containers; what Dynamo leaves alone."""
