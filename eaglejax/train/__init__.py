"""Training of EAGLE drafts in the process and on the mesh of their target: data, features, objectives,
trainer."""
