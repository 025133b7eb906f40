"""DeepSpeed: its folders, opened in place and without DeepSpeed, and its engine, which saves and loads through this library."""
