"""How many SMs each stage of one GPU may use (HorizonServe 4.4)."""
