// The forms of dense weights by the number that a launch names (linear/storage.py).
#pragma once

#include "group_units.cuh"
#include "weight_units.cuh"

template <int weights>
struct WeightUnits;
template <>
struct WeightUnits<0> {
  using Units = Bf16Units;
};
template <>
struct WeightUnits<1> {
  using Units = Fp8Units;
};
template <>
struct WeightUnits<2> {
  using Units = Mxfp4Units;
};
template <>
struct WeightUnits<3> {
  using Units = Int8Units;
};
template <>
struct WeightUnits<4> {
  using Units = Int4Units<64>;
};
template <>
struct WeightUnits<5> {
  using Units = Int4Units<32>;
};
