"""How a stage obtains its gradients."""
