"""GLM-4.5 to 4.7: grouped-query attention, and routed experts beside a shared one."""
