"""DFlash (arXiv 2602.06036) and JetSpec (arXiv 2606.18394): drafts a block over target states."""
