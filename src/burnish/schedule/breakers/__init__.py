"""What to do about work that fails: circuit breakers, retry budgets, hedges, cases for the gate."""
