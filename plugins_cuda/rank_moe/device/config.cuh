// The constants of RankMoe's exchanges: members of ``Config``, a struct that the lowering defines
// for each launch (CONFIG).
#pragma once

CONFIG
