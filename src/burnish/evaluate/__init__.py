"""Layer 7: suites, statistics, paired comparison and the regression gate."""
