// The storage formats of dense weights, by the number in a launch's constants (linear/storage.py).
#pragma once

#include "byte_units.cuh"
#include "nibble_units.cuh"
#include "table_units.cuh"
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
template <>
struct WeightUnits<6> {
  using Units = Q8Units<false>;
};
template <>
struct WeightUnits<7> {
  using Units = Fp8CodeUnits<false>;
};
template <>
struct WeightUnits<8> {
  using Units = MinimumUnits<4>;
};
template <>
struct WeightUnits<9> {
  using Units = KUnits<4>;
};
template <>
struct WeightUnits<10> {
  using Units = KUnits<5>;
};
template <>
struct WeightUnits<11> {
  using Units = Q6KUnits;
};
template <>
struct WeightUnits<12> {
  using Units = Fp8CodeUnits<true>;
};
template <>
struct WeightUnits<13> {
  using Units = Int4Units<64, WholeScales>;
};
template <>
struct WeightUnits<14> {
  using Units = Int4Units<32, WholeScales>;
};
template <>
struct WeightUnits<15> {
  using Units = Q8Units<true>;
};
template <>
struct WeightUnits<16> {
  using Units = SixBitUnits<true>;
};
template <>
struct WeightUnits<17> {
  using Units = MinimumUnits<5>;
};
template <>
struct WeightUnits<18> {
  using Units = Iq4Units;
};
template <>
struct WeightUnits<19> {
  using Units = Nvfp4Units;
};
template <>
struct WeightUnits<20> {
  using Units = MixedUnits;
};
template <>
struct WeightUnits<21> {
  using Units = SymmetricUnits;
};
