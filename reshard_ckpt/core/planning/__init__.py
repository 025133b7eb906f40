"""Plans: who writes what, who reads what, and what another topology would hold."""
