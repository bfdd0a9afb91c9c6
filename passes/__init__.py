"""FX graph to FX graph, one pass a file: what turns a captured graph and a plan into the program of a rank."""
