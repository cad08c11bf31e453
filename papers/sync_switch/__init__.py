"""Li, Mangoubi, Xu, Guo, "Sync-Switch", ICDCS 2021."""
