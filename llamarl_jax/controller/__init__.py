"""The paper's controller: program, loop, builder and launchers."""
