// What the exchanges of RankMoe are specialised by: the struct ``Config``, which the lowering
// writes for each launch (CONFIG).
#pragma once

CONFIG
