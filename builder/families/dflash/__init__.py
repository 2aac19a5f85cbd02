"""DFlash (arXiv 2602.06036) and JetSpec (arXiv 2606.18394): a block drafted over target states."""
