"""How far long work is: said where the work is done, heard where somebody listens."""
