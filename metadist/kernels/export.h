// Exports of function templates: as pointers, whose signatures need not be repeated.

#pragma once

// The pointer NAME to a function.
#define EXPORT_POINTER(NAME, ...) extern "C" auto* const NAME = __VA_ARGS__;

// The pointers NAME_f32 and NAME_f64 to a template's functions for float and double.
#define EXPORT(NAME) EXPORT_POINTER(NAME##_f32, NAME<float>) EXPORT_POINTER(NAME##_f64, NAME<double>)
