"""WHERE arrays live: meshes, rules and the slice plan between shardings."""
